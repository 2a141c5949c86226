from atlas_wm.cli.app import main

main()
