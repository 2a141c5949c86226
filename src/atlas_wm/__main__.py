from atlas_wm.cli import main

main()
